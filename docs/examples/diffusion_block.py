"""A block of a diffusion transformer and its training step.

W. Peebles and S. Xie, "Scalable diffusion models with transformers", 2023, figure 3 (adaLN-Zero).
"""

import rtxarr as rx
from rtxarr import nn, optim


class Block(nn.Module):
    """Attention and a perceptron; shift, scale and gate of both come from a condition.

    Parameters
    ----------
    width : int
    n_heads : int
    dtype : dtype, default float32
    """

    def __init__(self, width, n_heads, *, dtype=rx.float32):
        self.n_heads = n_heads
        self.condition = nn.Linear(width, 6 * width, dtype=dtype)
        self.qkv = nn.Linear(width, 3 * width, dtype=dtype)
        self.out = nn.Linear(width, width, dtype=dtype)
        self.up = nn.Linear(width, 4 * width, dtype=dtype)
        self.down = nn.Linear(4 * width, width, dtype=dtype)

    def forward(self, x, condition):
        """Return tokens of shape (n_images, n_tokens, width) for those and (n_images, width)."""
        n_images, n_tokens, width = x.shape
        parts = rx.reshape(self.condition(rx.silu(condition)), (n_images, 6, 1, width))
        shift_a, scale_a, gate_a, shift_b, scale_b, gate_b = (parts[:, i] for i in range(6))
        h = rx.layer_norm(x) * (1 + scale_a) + shift_a
        heads = rx.reshape(self.qkv(h), (n_images, n_tokens, 3, self.n_heads, -1))
        query, key, value = (rx.permute_dims(heads[:, :, i], (0, 2, 1, 3)) for i in range(3))
        heard = rx.permute_dims(rx.scaled_dot_product_attention(query, key, value), (0, 2, 1, 3))
        x = x + gate_a * self.out(rx.reshape(heard, x.shape))
        h = rx.layer_norm(x) * (1 + scale_b) + shift_b
        return x + gate_b * self.down(rx.gelu(self.up(h), approximate="tanh"))


def training_step(block, learning_rate=1e-4):
    """Return a function of tokens, conditions and targets that trains and gives the loss."""
    optimizer = optim.AdamW(block.parameters(), learning_rate)

    def step(x, condition, target):
        optimizer.zero_grad()
        error = rx.astype(block(x, condition) - target, rx.float32)
        loss = rx.mean(error * error)
        loss.backward()
        optimizer.step()
        return loss

    return step
