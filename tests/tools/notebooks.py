"""Run the notebooks of the documents, and write what they print and draw into them.

.venv/bin/python -m tests.tools.notebooks            # all of docs/notebooks
.venv/bin/python -m tests.tools.notebooks FILE ...
"""

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

from klatsch import pictures

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def shown(value):
    """What a notebook shows of the last expression of a cell."""
    if value is None:
        return []
    if isinstance(value, Figure):
        picture = base64.encodebytes(pictures.render(value, ".png", dpi=100)).decode()
        alt = f"A figure: {', '.join(filter(None, (axis.get_title() or axis.get_ylabel() for axis in value.axes)))}"
        data = {"image/png": picture, "text/plain": [repr(value)]}
        return [{"output_type": "display_data", "data": data, "metadata": {"alt": alt}}]
    return [{"output_type": "execute_result", "data": {"text/plain": [repr(value)]}, "metadata": {}}]


def run(path):
    """The content of a notebook with all outputs renewed."""
    content, names = json.loads(path.read_text()), {"__name__": "__main__"}
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    for count, cell in enumerate(code, 1):
        tree, value = ast.parse("".join(cell["source"])), None
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, path.name, "exec"), names)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), path.name, "eval"), names)
        text = printed.getvalue().splitlines(keepends=True)
        said = [{"output_type": "stream", "name": "stdout", "text": text}] if text else []
        cell |= {"execution_count": count, "outputs": said + shown(value)}
    return content


if __name__ == "__main__":
    for path in [Path(word) for word in sys.argv[1:]] or NOTEBOOKS:
        path.write_text(json.dumps(run(path), indent=1, ensure_ascii=False) + "\n")
        print(path)
