"""The paged KV cache: blocks, prefix sharing, storage, views. Nothing is imported here."""
