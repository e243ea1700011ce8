"""Files: durable writing and reading, safetensors headers, strict JSON, one writer per directory. Knows nothing of tensors."""
