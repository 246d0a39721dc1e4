"""What the recipes train: two spirals to tell apart, and a small network."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


def spirals(count=4096):
    """Points in the plane, and on which spiral each lies."""
    labels, angle = torch.randint(2, (count,)), torch.rand(count) * 6
    turned = angle + 3.14 * labels
    return TensorDataset(torch.stack([angle * turned.cos(), angle * turned.sin()], 1) / 3, labels)


def network():
    """A network for them, the same on every machine and run."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
