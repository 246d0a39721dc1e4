"""A Hugging Face Trainer whose processes gossip."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from klatsch.extras import need

need("GossipTrainer", "transformers", "accelerate")

from accelerate.optimizer import AcceleratedOptimizer
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from klatsch.arguments import named
from klatsch.files import write_atomically
from klatsch.optim import Gossip, average_, merged

ESTIMATES: dict[str, bool | None] = {"estimate": True, "exact": False, "off": None}


class GossipTrainer(Trainer):
    """Every process trains a model of its own, and an optimizer of klatsch gossips between them.

    All else is as with DDP. Evaluation is at x. What is saved is the merged model, the mean of all processes' x, and
    can be used without klatsch; checkpoints have the state of every process's optimizer, so that
    `train(resume_from_checkpoint=...)` goes on. After `train` every process has the merged model, or the best one with
    `load_best_model_at_end`.

    Args:
        args: those of Trainer, and so are the options.
        consensus: what `eval_consensus` is: "estimate" from what neighbours sent anyway, without a message; "exact",
            which sends the model once up and down a tree of the processes; or "off".
        merge: save the merged model, which costs the same once more for each; else the first process's x.
    """

    def __init__(self, *args: object, consensus: str = "estimate", merge: bool = True, **options: object) -> None:
        self._trains, self._merges, self._estimates = False, merge, named("consensus", consensus, ESTIMATES)
        super().__init__(*args, **options)

    def create_accelerator_and_postprocess(self) -> None:
        """Have Accelerate prepare the model as for evaluation, which is as for training, but for DDP."""
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)

    def create_optimizer(self, *args: object) -> torch.optim.Optimizer:
        """Create the optimizer, which must gossip."""
        super().create_optimizer(*args)
        return self._gossip

    def train(self, *args: object, **options: object) -> Any:
        """Train, and leave the merged model with every process."""
        self._trains = True
        try:
            result = super().train(*args, **options)
        finally:
            self._trains = False
        if not (self.args.load_best_model_at_end and self.state.best_model_checkpoint):
            self._gossip.eval()
            average_(self.model, parameters=True)
        return result

    def training_step(self, *args: object, **options: object) -> Any:
        """Have the loss in the optimizer's log, too, if it has one."""
        loss = super().training_step(*args, **options)
        self._gossip.log(loss=loss)
        return loss

    def log(self, logs: dict[str, float], *args: object, **options: object) -> None:
        """Give all callbacks what can be seen of the gossip beside the loss."""
        if self._trains and "loss" in logs:
            logs |= {f"gossip_{name}": value for name, value in self._gossip.counts().items()}
        super().log(logs, *args, **options)

    def evaluation_loop(self, *args: object, metric_key_prefix: str = "eval", **options: object) -> Any:
        """Evaluate, which Trainer does at x, and measure how far the processes are from each other."""
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **options)
        if self._trains and self._estimates is not None:
            output.metrics[f"{metric_key_prefix}_consensus"] = self._gossip.consensus(estimate=self._estimates)
        return output

    def save_model(self, *args: object, **options: object) -> None:
        """Save the merged model, or the first process's x; all processes ask together."""
        with ExitStack() as stack:
            if self._trains:
                stack.enter_context(merged(self.model) if self._merges else self._gossip.averaged())
            super().save_model(*args, **options)

    @property
    def _gossip(self) -> Gossip:
        optimizer = self.optimizer.optimizer if isinstance(self.optimizer, AcceleratedOptimizer) else self.optimizer
        if not isinstance(optimizer, Gossip):
            raise ValueError(
                f"the optimizer is {type(optimizer).__name__}, with which every process would train alone; give one of "
                "klatsch.optim (optimizer_cls_and_kwargs=(klatsch.optim.DATAdamW, {'lr': 1e-3})), or use Trainer"
            )
        return optimizer

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.process_index > 0:  # Trainer has saved that of the first one
            path = self._own_state(output_dir)
            torch.save(self.optimizer.state_dict(), content := BytesIO())
            path.parent.mkdir(parents=True, exist_ok=True)  # the first process may not have come so far
            write_atomically(path, content.getvalue())
        if dist.is_initialized():  # accelerate's own way asks for a GPU per process, even with use_cpu
            dist.barrier()  # older checkpoints are deleted when this one is whole

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if not (path := self._own_state(checkpoint)).exists():
            raise ValueError(
                f"{path} is missing, the state of this process's optimizer; copy it to where this process runs, or "
                "load the model alone and begin a new training"
            )
        self.optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _load_best_model(self) -> None:
        self._gossip.eval()
        with self._gossip.merging():  # all processes load the same one
            super()._load_best_model()

    def _own_state(self, folder: str) -> Path:
        name, rank = Path(OPTIMIZER_NAME), self.args.process_index
        return Path(folder, name if rank == 0 else f"{name.stem}-{rank}{name.suffix}")
