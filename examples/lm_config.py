"""The sizes of train_lm.py: of the model (see lm_model.py) and of its training."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model and of its training. The defaults are the CPU preset."""

    layers: int = 2
    width: int = 128
    heads: int = 4
    latent: int = 48  # the op's value_dim
    rotary: int = 16
    content: int = 32  # of a head's queries before absorption, and of its values
    topk: int = 32
    index_heads: int = 2
    index_dim: int = 32
    context: int = 256
    batch: int = 4
    steps: int = 600
    dense_share: float = 0.15  # of the steps: the dense warm-up, which comes first
    learning_rate: float = 3e-3
    dtype: str = "float32"
    remat: bool = False  # compute layers again in the backward pass, all but their attention
    implementation: str | None = None

    @property
    def dense_steps(self) -> int:
        return math.ceil(self.dense_share * self.steps)

    @property
    def scale(self) -> float:
        """Factor of the logits: by a head's query as it is before absorption."""
        return (self.content + self.rotary) ** -0.5


PRESETS = {
    "cpu": Config(),
    "gpu": Config(
        layers=4,
        width=1024,
        heads=64,
        latent=512,
        rotary=64,
        content=64,
        topk=1024,
        index_heads=8,
        index_dim=64,
        context=8192,
        batch=1,
        steps=1000,
        dense_share=0.1,
        learning_rate=1e-3,
        dtype="bfloat16",
        remat=True,
    ),
    # Seconds, and learns next to nothing: to see a run.
    "tiny": Config(
        layers=1,
        width=32,
        heads=2,
        latent=8,
        rotary=8,
        content=8,
        topk=8,
        index_dim=8,
        context=64,
        batch=32,
        steps=20,
        dense_share=0.4,
    ),
}
