"""The encoding of docs/own.md: `WIRE` is its name."""

import re
from pathlib import Path

_document = Path(__file__).parents[2] / "docs" / "own.md"
_blocks = re.findall(r"```python\n(.*?)```", _document.read_text(), re.S)
exec(next(block for block in _blocks if "class Signs" in block))
WIRE = f"{__file__}:Signs"
