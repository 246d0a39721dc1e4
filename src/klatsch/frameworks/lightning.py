"""A strategy for Lightning: `Trainer(strategy=GossipStrategy(), devices=4)`."""

from __future__ import annotations

from contextlib import ExitStack
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from klatsch.extras import need

need("GossipStrategy", "lightning")

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer, callbacks
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from klatsch.optim import Gossip, average_, merged

# Callbacks that put an average of their own into the model; older versions do not have all of them.
AVERAGING = tuple(
    vars(callbacks)[name] for name in ("WeightAveraging", "StochasticWeightAveraging") if name in vars(callbacks)
)
# What differs between processes, and lies beside a checkpoint.
OWN = ("optimizer_states", "lr_schedulers", "loops", "global_step", "pytorch-lightning_version")


class GossipStrategy(DDPStrategy):
    """Every process trains a model of its own, and an optimizer of klatsch gossips between them.

    All else is as with DDP. Validation is at x. Checkpoints have the merged model, the mean of all processes' x, and
    can be used without klatsch. The state of the optimizers lies beside them, a file for each process but the first
    (`last.ckpt.rank1`), so that `fit(ckpt_path=...)` goes on; with another number of processes, load the model and
    begin a new training. After `fit` every process has the merged model. Processes with fewer batches wait at the end
    of an epoch, in rounds of gossip without a gradient.

    Args:
        merge: save the merged model, which sends it once up and down a tree of the processes; else the first one's x.
        options: those of DDPStrategy, such as `process_group_backend`.
    """

    strategy_name = "gossip"
    optimizers: list[Gossip]

    def __init__(self, *, merge: bool = True, **options: object) -> None:
        super().__init__(**options)
        self._merges = merge
        self._at_x = ExitStack()
        self._end_of_epochs = callbacks.LambdaCallback(on_train_batch_end=_end_epoch)
        self._saved_as: dict[str, str] = {}  # by this process's name of a checkpoint, that of the first one

    def configure_ddp(self) -> None:
        """Leave the model as it is."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the optimizers, which must gossip; refuse callbacks that put other weights into the model."""
        for callback in trainer.callbacks:
            if isinstance(callback, AVERAGING):
                raise ValueError(
                    f"{type(callback).__name__} averages the weights of one process, where GossipStrategy validates "
                    "and keeps x; leave it out: GossipSGD(params, lr, average='fixed(0.999)') keeps an EMA as x, and "
                    "DATSGD with beta=0.9 and DATAdamW average by themselves"
                )
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if not isinstance(optimizer, Gossip):
                raise ValueError(
                    f"configure_optimizers() returns {type(optimizer).__name__}, with which every process would train "
                    "alone; return one of klatsch.optim, such as GossipSGD, or use strategy='ddp'"
                )

    def on_train_start(self) -> None:
        """See whether all processes have as many batches."""
        trainer = self.lightning_module.trainer
        batches = self.all_gather(torch.tensor(float(trainer.num_training_batches), device=self.root_device)).flatten()
        if isfinite(float(batches.max())) and float(batches.min()) == float(batches.max()):
            return
        if trainer.max_steps > 0 or float(batches.min()) == 0:
            raise ValueError(
                f"the processes have {', '.join(f'{n:g}' for n in batches.tolist())} batches: give each of them at "
                f"least one, and Trainer max_epochs instead of max_steps = {trainer.max_steps}, which they would not "
                "reach together"
            )
        trainer.callbacks.insert(0, self._end_of_epochs)
        # It is a collective in every batch; without it a process that is told to end ends alone.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Give the loggers what can be seen of the gossip, as often as they get other numbers."""
        trainer = self.lightning_module.trainer
        if trainer.loggers and trainer.global_step and trainer.global_step % trainer.log_every_n_steps == 0:
            seen = {f"gossip/{name}": v for optimizer in self.optimizers for name, v in optimizer.counts().items()}
            for logger in trainer.loggers:
                logger.log_metrics(seen, step=trainer.global_step)

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
        if self._end_of_epochs in (known := self.lightning_module.trainer.callbacks):
            known.remove(self._end_of_epochs)
        for optimizer in self.optimizers:
            optimizer.eval()
        average_(self.lightning_module, parameters=True)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The merged model, or the first process's x; all processes ask together."""
        with ExitStack() as stack:
            for point in [merged(self.lightning_module)] if self._merges else [o.averaged() for o in self.optimizers]:
                stack.enter_context(point)
            return {name: value.detach().clone() for name, value in super().lightning_module_state_dict().items()}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: object | None = None
    ) -> None:
        """Write the checkpoint, and beside it what is this process's own; all under the first one's name."""
        named = str(self.broadcast(str(filepath)))  # names may have the number of steps
        self._saved_as[str(filepath)] = named
        super().save_checkpoint(checkpoint, named, storage_options)
        if not self.is_global_zero and "optimizer_states" in checkpoint:
            own = {name: checkpoint[name] for name in OWN}
            self.checkpoint_io.save_checkpoint(own, self._beside(named), storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, *args: object, **options: object) -> dict[str, Any]:
        """Read it, with what is this process's own."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **options)
        if not self.is_global_zero and "optimizer_states" in checkpoint and self._fits:
            path = self._beside(checkpoint_path)
            if not get_filesystem(path).exists(path):
                raise ValueError(
                    f"{path} is missing, the state of this process's optimizer; copy it to where this process runs, or "
                    "load the model alone (load_from_checkpoint) and begin a new training"
                )
            own = super().load_checkpoint(path, *args, **options)
            ours, firsts = ([state["gossip"]["rounds"] for state in c["optimizer_states"]] for c in (own, checkpoint))
            if ours != firsts:
                rounds = f"{path} is of round {ours[0]}, but {checkpoint_path} of round {firsts[0]}"
                raise ValueError(f"{rounds}; copy the files of one checkpoint")
            checkpoint |= own
        return checkpoint

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove it, and this process's file beside it."""
        named = self._saved_as.pop(str(filepath), str(filepath))
        super().remove_checkpoint(named)
        if not self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(self._beside(named))

    @property
    def _fits(self) -> bool:
        return bool(self.lightning_module.trainer.state.fn == TrainerFn.FITTING)

    def _beside(self, path: str | Path) -> str:
        return f"{path}.rank{self.global_rank}"


def _end_epoch(trainer: Trainer, *_: object) -> None:
    """Wait for processes with more batches, before anything is validated or saved."""
    if trainer.is_last_batch:
        for optimizer in trainer.optimizers:
            optimizer.end_epoch()
