"""Adapters to training frameworks: thin, imported on demand, none needed for the operators.

slime      calculate_log_probs_and_entropy with slime's signature and return shapes
megatron   Megatron's [s, b, V_local] layout and its tensor-parallel group
"""
