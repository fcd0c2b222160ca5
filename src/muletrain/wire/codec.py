"""Tensor codecs: fp32, fp16, bf16 and block-wise 8-bit (SWARM app. J.1, "quantized activations"; block 4096, absmax)."""
