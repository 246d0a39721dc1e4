"""Several machines: gpt_single.py, each with its own packages. Run: torchrun --nproc-per-node 4 gpt.py."""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812

import klatsch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--save", type=Path, default="gpt.pt", help="file for the model")
parser.add_argument("--checkpoints", type=Path, help="folder to resume from after a restart")
given = parser.parse_args()
WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 128, 4, 2, 64, 16
REPORT = max(1, given.steps // 10)


class Block(nn.Module):
    """Attention to earlier bytes, then an MLP for each byte."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.attention(self.before_attention(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.merge(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """A GPT on bytes, with one matrix for embedding and output."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.end = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(WIDTH)
        for table in (self.bytes, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.bytes(text) + self.places.weight[: text.shape[1]]
        return self.end(self.blocks(x)) @ self.bytes.weight.T


def windows(text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Windows of a text, with the byte that follows each."""
    return text[starts[:, None] + torch.arange(CONTEXT + 1)].long()


def loss_of(model: nn.Module, some: torch.Tensor) -> torch.Tensor:
    """Nats per byte: how surprising each byte is after those before it."""
    return F.cross_entropy(model(some[:, :-1]).flatten(0, 1), some[:, 1:].flatten())


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
root = Path(sysconfig.get_paths()["stdlib"])
packages = sorted(path for path in root.iterdir() if path.is_dir() and path.name.isalpha() and path.name != "test")
files = {package: sorted(package.rglob("*.py")) for package in packages}
held_out = b"".join(each.read_bytes() for some in files.values() for each in some[::10])
own_text = b"".join(each.read_bytes() for p in packages[rank::size] for k, each in enumerate(files[p]) if k % 10)
text, held_out = (torch.frombuffer(bytearray(some), dtype=torch.uint8) for some in (own_text, held_out))

model = GPT()
optimizer = klatsch.optim.GossipAdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1)
checkpointer = klatsch.Checkpointer(given.checkpoints, every=REPORT) if given.checkpoints else None
done = checkpointer.resume(optimizer, model=model) if checkpointer else 0
for step in range(done + 1, given.steps + 1):
    optimizer.zero_grad()
    loss = loss_of(model, windows(text, torch.randint(len(text) - CONTEXT, (BATCH,))))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if checkpointer:
        checkpointer.step()
    if step % REPORT == 0:
        print(f"rank {rank}, step {step}: loss {loss.item():.2f}", flush=True)

model.eval()
optimizer.eval()  # evaluate at x, also with rules that average
klatsch.average_(model, parameters=True)  # the merged model
dist.destroy_process_group()
if rank > 0:  # all have the same model now
    raise SystemExit
with torch.no_grad():
    starts = torch.arange(0, len(held_out) - CONTEXT, (len(held_out) - CONTEXT) // 500)
    print(f"{loss_of(model, windows(held_out, starts)).item() / 0.6931:.2f} bits per byte of files it has not seen")
    sample = list(b"def ")
    for _ in range(200):
        odds = model(torch.tensor([sample[-CONTEXT:]]))[0, -1].div(0.8).softmax(0)
        sample.append(int(torch.multinomial(odds, 1)))
    print(bytes(sample).decode(errors="replace"))
    torch.save(model.state_dict(), given.save)
