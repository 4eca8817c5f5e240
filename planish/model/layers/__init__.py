"""What layers consist of: packed and quantized linears, experts, LoRA adapters, RoPE and recurrent
states.
"""
