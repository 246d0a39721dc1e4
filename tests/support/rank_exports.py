"""Every way to save a model, on ranks: while it trains, at x, and merged."""

from contextlib import nullcontext

import accelerate
import huggingface_hub
import lightning
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

import klatsch
from tests.support.rank_frameworks import batch, keep


class Tiny(PreTrainedModel):
    """A model that every exporter accepts, with a memory format and a dtype of its own for some layers."""

    config_class = PreTrainedConfig

    def __init__(self, config):
        super().__init__(config)
        image = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 8, 2), nn.Flatten())
        self.net = nn.Sequential(image, nn.BatchNorm1d(8), nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
        self.net.to(memory_format=torch.channels_last)

    def forward(self, inputs):
        return self.net(inputs)


def exporters(model):
    """By name: what saves a model under a path, and what reads its state_dict() there."""
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare_model(model, evaluation_mode=True)
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    inputs = (batch(0, 0)[0],)

    def save_torch_model(model, path):
        path.mkdir()
        huggingface_hub.save_torch_model(model, path)

    def load(path):
        return torch.load(path, weights_only=True)

    def load_layer(path):
        assert path.stat().st_size < 3000, f"{path.stat().st_size} bytes for 65 numbers"
        return {f"net.4.{name}": v for name, v in load(path).items()}

    def load_file(path):
        (file,) = path.rglob("*.safetensors") if path.is_dir() else [path]
        return safetensors.torch.load_file(file)

    return {
        "torch.save": (lambda m, path: torch.save(m.state_dict(), path), load),
        "torch.save of the last layer": (lambda m, path: torch.save(m.net[4].state_dict(), path), load_layer),
        "torch.save of the model": (torch.save, lambda path: torch.load(path, weights_only=False).state_dict()),
        "safetensors save_file": (lambda m, path: safetensors.torch.save_file(m.state_dict(), path), load_file),
        "safetensors save_model": (safetensors.torch.save_model, load_file),
        "huggingface_hub": (save_torch_model, load_file),
        "accelerate save_model": (accelerator.save_model, load_file),
        "accelerate save": (lambda m, path: accelerator.save(m.state_dict(), path, safe_serialization=True), load_file),
        "accelerate save_state": (lambda m, path: accelerator.save_state(path), load_file),
        "transformers": (lambda m, path: m.save_pretrained(path), load_file),
        "lightning": (lambda m, path: fabric.save(path, {"model": m}), lambda path: load(path)["model"]),
        "torch.export": (
            lambda m, path: torch.export.save(torch.export.export(m, inputs), path),
            lambda path: torch.export.load(path).state_dict,
        ),
        "torch.jit": (
            lambda m, path: torch.jit.save(torch.jit.trace(m, inputs), path),
            lambda path: torch.jit.load(path).state_dict(),
        ),
    }


def exports(folder):
    """What the first rank finds of each exporter, by what the model holds: names lost or changed, or an error."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Tiny(PreTrainedConfig())
    ways, found = exporters(model), {}
    optimizer = klatsch.optim.DATSGD(model.parameters(), lr=0.1, topology="ring", beta=0.9)
    for t in range(3):
        inputs, targets = batch(dist.get_rank(), t)
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    model.eval()
    own = folder / f"rank-{dist.get_rank()}"
    own.mkdir()
    for point, inside in (("query", nullcontext()), ("x", optimizer.averaged()), ("merged", klatsch.merged(model))):
        with inside:
            expected = {name: v.clone() for name, v in model.state_dict().items()}
            for way, (save, load) in ways.items():
                try:
                    found[f"{way}, {point}"] = lost(save, load, model, own / f"{way} {point}.pt2", expected)
                except Exception as error:
                    found[f"{way}, {point}"] = f"{type(error).__name__}: {error}"
    keep(folder, found)


def lost(save, load, model, path, expected):
    """The names that are not what they were, on the first rank; all save, though some exporters let only it write."""
    save(model, path)
    if dist.get_rank() > 0:
        return []
    saved = load(path)
    wanted = [name for name in expected if name.startswith("net.4." if "layer" in path.name else "net.")]
    return [name for name in wanted if name not in saved or not torch.equal(saved[name], expected[name])]
