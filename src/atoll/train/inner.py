"""TEMPORARY stand-in by the lead until the model helper's file lands: overwrite freely."""
import math
from contextlib import nullcontext
from dataclasses import dataclass
import torch
@dataclass(frozen=True)
class AdamW:
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    eps: float = 1e-8
    def build(self, model):
        return _Built(torch.optim.AdamW(model.parameters(), lr=self.lr, betas=self.betas, weight_decay=self.weight_decay, eps=self.eps, fused=True), self.lr)
Inner = AdamW
class _Built:
    def __init__(self, o, lr): self.o, self.lr = o, lr
    def step(self): self.o.step()
    def zero_grad(self): self.o.zero_grad()
    def state_dict(self): return self.o.state_dict()
    def load_state_dict(self, s): self.o.load_state_dict(s)
    def set_lr_scale(self, f):
        for g in self.o.param_groups: g["lr"] = self.lr * f
def warmup_cosine(warmup, steps, floor=0.0):
    def f(step):
        if step < warmup: return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
    return f
def clip_gradients(parameters, max_norm): return torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
def autocast(precision): return torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()
