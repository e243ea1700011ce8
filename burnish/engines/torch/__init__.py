"""The engine on PyTorch FSDP2."""
