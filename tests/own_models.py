"""What users might bring: factories of modules with a loss of their own, of samples, and wrong ones."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

SIDE, CLASSES = 8, 5
NAME = 3
"""Not a function."""


class Regression(nn.Module):
    """Images fp32 [B, 3, 8, 8] -> two numbers each; two values go from block to block, targets are used at the end."""

    def __init__(self, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(2, width), nn.GELU(), nn.Dropout(dropout))
            for _ in range(depth)
        )
        self.head = nn.Linear(2 * width, 2)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        wanted = targets * 2 - 1
        x = first = self.stem(images - self.mean)
        for block in self.blocks:
            x = x + block(x)
        return F.smooth_l1_loss(self.head(torch.cat([x.mean((2, 3)), first.amax((2, 3))], dim=1)), wanted)


def regression(width: int = 8, depth: int = 4, dropout: float = 0.1) -> nn.Module:
    return Regression(width, depth, dropout)


class Overflowing(Regression):
    """The gradient of the loss is beyond fp32."""

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        return super().forward(images, targets) * 1e30 * 1e30


def overflowing() -> nn.Module:
    return Overflowing(8, 4, 0.1)


def partly_frozen() -> nn.Module:
    """Without its first layers, and some numbers of later ones."""
    model = Regression(8, 4, 0.1)
    for part in (model.stem, model.blocks[0], model.blocks[2][1], model.blocks[3][0].weight, model.head.bias):
        part.requires_grad_(requires_grad=False)
    return model


class Classifier(nn.Module):
    """A vision transformer of ``transformers``, with the usual loss."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        config = ViTConfig(
            hidden_size=32,
            num_hidden_layers=depth,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=SIDE,
            patch_size=4,
            num_labels=CLASSES,
        )
        self.vit = ViTForImageClassification(config)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.vit(pixel_values=images).logits, labels)


def vit(depth: int = 3) -> nn.Module:
    model = Classifier(depth)
    for parameter in model.parameters():  # some of them large: a bias of keys is 0 at first, and gets no gradient
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


class Images:
    """``size`` images, each with two numbers, or with a class."""

    def __init__(self, first: int, size: int, *, classes: bool) -> None:
        self._first, self._size, self._classes = first, size, classes

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        draws = torch.Generator().manual_seed(self._first + k)
        image = torch.rand(3, SIDE, SIDE, generator=draws)
        if self._classes:
            return image, torch.tensor((self._first + k) % CLASSES)
        return image, torch.stack([image.mean(), image[0].std()])


def images_with_numbers() -> tuple[Any, Any]:
    return Images(0, 50, classes=False), Images(1000, 12, classes=False)


def images_with_classes() -> tuple[Any, Any]:
    return Images(0, 50, classes=True), Images(1000, 12, classes=True)


class Words(nn.Module):
    """Tokens int64 [B, T] and their next ones, of a text."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, vocab)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x).cumsum(1) / torch.tensor(8.0))  # a constant that is made on the way
        logits: Tensor = self.head(x)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def words(vocab: int = 300) -> nn.Module:
    return Words(vocab)


def tied_words(*, frozen: bool) -> nn.Module:
    """The weights of input and output are one."""
    model = Words(300)
    model.head.weight = model.embed.weight.requires_grad_(not frozen)
    return model


class Windowed(Words):
    """Attends to the last tokens only, by a mask that it keeps as a buffer [longest, longest]."""

    def __init__(self, window: int, longest: int) -> None:
        super().__init__(vocab=300)
        seen = torch.ones(longest, longest, dtype=torch.bool).tril()
        self.register_buffer("seen", seen & ~seen.tril(-window))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override] # it writes no text
        x, seen = self.embed(tokens), self.get_buffer("seen")[: tokens.shape[1], : tokens.shape[1]]
        for layer in self.layers:
            y = layer(x)[:, None]  # one head
            x = x + F.scaled_dot_product_attention(y, y, y, attn_mask=seen)[:, 0]
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def windowed(window: int = 9, longest: int = 32) -> nn.Module:
    return Windowed(window, longest)


class Placed(Words):
    """Knows ``longest`` positions."""

    def __init__(self, longest: int) -> None:
        super().__init__(vocab=300)
        self.place = nn.Embedding(longest, 16)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override] # it writes no text
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def placed(longest: int = 32) -> nn.Module:
    return Placed(longest)


# Wrong ones -----------------------------------------------------------------------------------------------------------


def raises() -> nn.Module:
    raise ValueError("no such thing as a free mule")


def leaves() -> nn.Module:
    sys.exit("no mule today")


def nothing() -> None:
    return None


class Wrong(nn.Module):
    """Of a ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.Sequential(*(nn.Linear(3 * SIDE * SIDE if k == 0 else 4, 4) for k in range(3)))
        if kind == "gaps":
            self.layers = nn.Sequential(*(layer for linear in self.layers for layer in (linear, nn.ReLU())))
        if kind == "batchnorm":
            self.norm = nn.BatchNorm1d(4)
        if kind == "unused":
            self.extra = nn.Linear(2, 2)
        if kind == "frozen":
            self.requires_grad_(requires_grad=False)
        if kind == "plain":
            self.scale = torch.ones(4)
        if kind == "taken":
            self.bind = nn.Linear(4, 4)

    def forward(self, images: Tensor, targets: Tensor) -> Any:
        x = images.flatten(1)
        if self.kind == "early":
            x = x + targets[:, :1]
        if self.kind == "shape":
            x = images
        if self.kind == "loop":
            x = torch.stack([image * 2 for image in x])
        if self.kind == "again":
            x = self.layers[1](self.layers[0](x))
        if self.kind == "flag":
            x = self.layers[0](x)
            x = torch.where(x.amax(0) > 0, self.layers[2](self.layers[1](x)), x)
        x = self.layers[2](x) if self.kind in ("again", "flag") else self.layers(x)
        if self.kind == "again":
            x = self.layers[1](x)
        if self.kind == "batchnorm":
            x = self.norm(x)
        if self.kind == "value" and float(x.sum()) > 0:
            x = -x
        if self.kind == "sizes":
            x = x[x > 0]
            return x.mean()
        if self.kind == "random":
            x = x + torch.rand_like(x)
        if self.kind == "vector":
            return (x[:, :2] - targets).square().mean(1)
        if self.kind == "logits":
            return {"loss": x}
        if self.kind == "taken":
            x = self.bind(x)
        return F.mse_loss(x[:, :2], targets)


def wrong(kind: str) -> nn.Module:
    return Wrong(kind)


class List(list[Any]):
    """Samples."""


def uneven() -> tuple[Any, Any]:
    return List([(torch.zeros(3), 0.5), (torch.zeros(4), 0.5)]), List([(torch.zeros(3), 0.5)])


def empty() -> tuple[Any, Any]:
    return List([(torch.zeros(3), 0.5)]), List()


def texts() -> tuple[Any, Any]:
    return List([("a", "b")]), List([("a", "b")])


def one() -> Any:
    return List([(torch.zeros(3), 0.5)])


def unlimited() -> tuple[Any, Any]:
    return List([(torch.full((3, SIDE, SIDE), float("nan")), torch.zeros(2))] * 2), Images(0, 2, classes=False)


class Restless(Images):
    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        return torch.rand(3, SIDE, SIDE), torch.zeros(2)


def restless() -> tuple[Any, Any]:
    return Restless(0, 4, classes=False), Restless(0, 4, classes=False)


def unset(value: str) -> nn.Module:
    """A module with one weight of ``value`` ('nan', 'inf'), as ``torch.empty`` may leave there."""
    module = regression()
    with torch.no_grad():
        next(iter(module.parameters())).view(-1)[3] = float(value)
    return module


RAISES, NOT_A_NUMBER = (37, 141), (41,)
"""Samples of ``spoiled_images`` that cannot be used. None of them is looked at before a run."""


class Spoiled(Images):
    def __getitem__(self, k: int) -> tuple[Any, Any]:
        image, target = super().__getitem__(k)
        if k in RAISES:
            raise OSError(f"image {k} is broken")
        return (image * float("nan") if k in NOT_A_NUMBER else image), target


def spoiled_images() -> tuple[Any, Any]:
    return Spoiled(0, 500, classes=False), Images(1000, 12, classes=False)
