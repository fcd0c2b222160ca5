"""Train a module of your own on images: which corner is bright? Module and dataset are built in this script, on this machine.

python examples/own_module.py
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import muletrain


class Corners(Dataset):
    """Noise [3, 16, 16] with one bright corner, which is the class. The same number always gives the same image."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, k: int) -> tuple[torch.Tensor, int]:
        image = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(k))
        corner = int(torch.randint(4, (1,), generator=torch.Generator().manual_seed(k + 10_000)))
        image[:, 8 * (corner // 2) :, 8 * (corner % 2) :][:, :8, :8] += 1
        return image, corner


class Net(nn.Module):
    """Layers in an nn.ModuleList, which stages share among them; ``forward`` returns the mean loss."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.GELU())
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 4)

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))

    def forward(self, images: torch.Tensor, corners: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.logits(images), corners)


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
data = Corners()
run = muletrain.train(
    model=Net(width=32, depth=4),
    data=data,  # every 20th image is held out; (train, heldout) names both
    train={"steps": steps, "batch": 32, "microbatch": 8},
    fleet={"stages": 2, "peers": 2},
    optimizer={"lr": 3e-3, "warmup": 5},
)
net = run.model()  # a Net with the trained weights
with torch.no_grad():
    answers = net.logits(torch.stack([data[k][0] for k in range(0, 2000, 20)])).argmax(1)
right = (answers == torch.tensor([data[k][1] for k in range(0, 2000, 20)])).float().mean()
print(f"held-out loss {run.loss:.3f}, {right:.0%} of 100 held-out images right")
