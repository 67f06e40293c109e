"""`hf-wsvd demo`: the embedded vision-language model, dense and compressed, side by side."""


def demo() -> None:
    """x"""
