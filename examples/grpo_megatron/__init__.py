"""Parts of `examples/04_grpo_megatron.py`."""
