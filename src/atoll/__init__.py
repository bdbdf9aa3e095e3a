"""Atoll trains language models, or any PyTorch module, on islands of hardware joined by slow and unreliable links.

It is a library, a command line and a runtime for the DiLoCo family of methods. A method is a value composed of small
pure parts, and the same value runs in one thread, in threads, over `torch.distributed`, across the internet, and in a
simulator on virtual time.
"""

__version__ = "0.1.0"
