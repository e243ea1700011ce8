"""Durable files, safetensors headers, strict JSON, leases. Knows nothing of tensors."""
