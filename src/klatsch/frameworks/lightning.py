"""A strategy for Lightning: `Trainer(strategy=GossipStrategy(), devices=4)`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from klatsch.optim import Gossip, average_, merged


class GossipStrategy(DDPStrategy):
    """Every process trains a model of its own, and an optimizer of klatsch gossips between them.

    All else is as with DDP: launchers, samplers that give every process its part of the data, logs, `sync_dist`.
    Validation is at x. Checkpoints have the merged model, the mean of all processes' x, and can be used without
    klatsch. The state of the optimizers lies beside them, a file for each process but the first (`last.ckpt.rank1`),
    so that `fit(ckpt_path=...)` goes on; with another number of processes, load the model and begin a new training.
    After `fit` every process has the merged model.

    Args:
        options: those of DDPStrategy, such as `process_group_backend`.
    """

    strategy_name = "gossip"
    optimizers: list[Gossip]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._at_x = ExitStack()

    def configure_ddp(self) -> None:
        """Leave the model as it is."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the optimizers, which must gossip."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if not isinstance(optimizer, Gossip):
                raise ValueError(
                    f"configure_optimizers() returns {type(optimizer).__name__}, with which every process would train "
                    "alone; return one of klatsch.optim, such as DATSGD, or use strategy='ddp'"
                )

    def on_validation_start(self) -> None:
        """Put x into the model, which otherwise holds what it was given, such as the best one."""
        for optimizer in self.optimizers if self._fits else ():
            self._at_x.enter_context(optimizer.averaged())

    def on_validation_end(self) -> None:
        """Put the point back at which it trains."""
        self._at_x.close()

    def on_exception(self, exception: BaseException) -> None:
        """Leave x in the model: other processes may be anywhere."""
        self._left = self._at_x.pop_all()
        super().on_exception(exception)

    def on_train_end(self) -> None:
        """Leave the merged model with every process, to test or save."""
        for optimizer in self.optimizers:
            optimizer.eval()
        average_(self.lightning_module, parameters=True)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The merged model; all processes ask together."""
        with merged(self.lightning_module):
            return {name: value.detach().clone() for name, value in super().lightning_module_state_dict().items()}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write the checkpoint, and beside it the state of this process's optimizers."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if not self.is_global_zero and "optimizer_states" in checkpoint:
            mine = {name: checkpoint[name] for name in ("optimizer_states", "pytorch-lightning_version", "global_step")}
            self.checkpoint_io.save_checkpoint(mine, self._mine(filepath), storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **options: Any) -> dict[str, Any]:
        """Read it, with the state of this process's optimizers."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **options)
        if not self.is_global_zero and "optimizer_states" in checkpoint and self._fits:
            mine = self._mine(checkpoint_path)
            if not get_filesystem(mine).exists(mine):
                raise ValueError(
                    f"{mine} is missing, the state of this process's optimizer; copy it to where this process runs, or "
                    "load the model alone (load_from_checkpoint) and begin a new training"
                )
            own = super().load_checkpoint(mine, *args, **options)
            if own["global_step"] != checkpoint["global_step"]:
                raise ValueError(
                    f"{mine} is of step {own['global_step']}, but {checkpoint_path} of step "
                    f"{checkpoint['global_step']}; copy the files of one checkpoint"
                )
            checkpoint["optimizer_states"] = own["optimizer_states"]
        return checkpoint

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove it, and this process's file beside it."""
        super().remove_checkpoint(filepath)
        if not self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(self._mine(filepath))

    @property
    def _fits(self) -> bool:
        return bool(self.lightning_module.trainer.state.fn == TrainerFn.FITTING)

    def _mine(self, path: str | Path) -> str:
        return f"{path}.rank{self.global_rank}"
