"""Pretrained models become this library's: from RoPE by distillation, from and to fla's format."""
