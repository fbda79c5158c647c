"""Models of the Llama/Qwen2/Qwen3 family: files, tokenizer, decoder, generation, perplexity.

Nothing is imported here: the command line reads this package before torch is needed.
"""
