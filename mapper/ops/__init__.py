"""Facts about dtypes and operations; nothing here imports torch."""
