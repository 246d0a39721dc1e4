"""`klatsch checkpoint`: what a folder of checkpoints holds, and the merged model in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from klatsch import files
from klatsch.cli import terminal
from klatsch.cli.app import command
from klatsch.cli.terminal import AsJson, print_json, text
from klatsch.units import size

KIND = "safetensors"


@command(
    "checkpoint checkpoints",
    "checkpoint checkpoints --export model.safetensors",
    "checkpoint checkpoints --json",
    more="If every machine has a folder of its own, copy them into one first. Only an export compares checksums.",
)
def checkpoint(
    folder: Annotated[Path, typer.Argument(help="The folder of a klatsch.Checkpointer.")],
    export: Annotated[
        Path | None, text("Write the merged model of the newest complete round, by parameter names.", metavar="FILE")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the checkpoints of a training, or export the merged model, without the training script."""
    from klatsch.ranks import saved
    from klatsch.ranks.failures import shown

    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the one that klatsch.Checkpointer writes to")
    if export is not None and export.suffix != f".{KIND}":
        raise ValueError(f"--export {export}: give a name that ends in .{KIND}, such as model.{KIND}")
    held = saved.files(folder)
    if not held:
        raise ValueError(f"{folder} holds no checkpoints of klatsch.Checkpointer, such as {saved.name(0, None, 100)}")
    if export is not None:
        files.check_output(export, KIND, *(file.path for file in held))
    sound = [file for file in held if not file.error]
    rounds = saved.rounds_of(file.seen for file in sound)
    best = next((each for each in rounds if each.lacks() <= 0), None)
    lines = []
    for each in sorted(rounds, key=lambda each: (each.training[0], each.rounds, len(each.training))):
        of_round = [file for file in sound if (file.seen.training, file.seen.rounds) == each[:2]]
        state = "complete" if each.lacks() <= 0 else f"lacks {shown(sorted(each.crew - each.held))}"
        lines.append(
            {
                "training": each.training[0][:8],
                "round": f"{each.rounds:,}",
                "rule": str(of_round[0].header["run"].get("rule")),
                "topology": of_round[0].header["topology"].rpartition(" ")[0],
                "ranks": shown(sorted(each.held)).partition(" ")[2],
                "gone": shown(gone).partition(" ")[2] if (gone := sorted({*range(each.size)} - each.crew)) else "",
                "size": size(sum(file.path.stat().st_size for file in of_round)),
                "state": state + " (newest)" * (each is best),
            }
        )
    errors = [file.error for file in held if file.error]
    if as_json:
        print_json({"rounds": lines, "errors": errors, "newest": None if best is None else best.rounds})
    elif lines:
        terminal.print_table(f"{folder}", lines, ["training", "topology", "gone", "size"])
    for error in errors:
        terminal.note(error, "yellow")
    if export is None:
        if best is not None:
            terminal.note(f"klatsch checkpoint {folder} --export model.{KIND} writes the model of round {best.rounds}")
        return
    from safetensors.torch import save

    from klatsch.optim.checkpointer import merged_of

    if best is None:
        raise ValueError(f"no round in {folder} is complete; bring the files of all its ranks together first")
    model, ranks = merged_of(held, best), sorted(best.crew & best.held)
    facts = {"rounds": best.rounds, "ranks": ranks, "training": best.training[0]}
    files.save(export, save(model, {"format": "pt", "klatsch": json.dumps(facts)}), KIND)
    numbers = f"{len(model)} tensors with {sum(v.numel() for v in model.values()):,} numbers"
    print(f"written to {export}: {numbers}, the mean of {len(ranks)} ranks after round {best.rounds}")
