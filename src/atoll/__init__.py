"""Atoll trains language models, or any PyTorch module, on islands of hardware joined by slow and unreliable links.

It is a library and a command line for the DiLoCo family of methods. A method is a value composed of small pure parts,
and the same value runs in one thread, in threads, and over `torch.distributed`.
"""

__version__ = "0.1.0"
