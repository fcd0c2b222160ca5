"""Bytes on the wire: frames, codecs of tensors, and states as safetensors files."""
