"""Where each method was published, as BibTeX. Authors beyond the first are left to the bibliography."""

_DILOCO = """\
@misc{douillard2023diloco,
  title         = {DiLoCo: Distributed Low-Communication Training of Language Models},
  author        = {Douillard, Arthur and others},
  year          = {2023},
  eprint        = {2311.08105},
  archivePrefix = {arXiv}
}
"""

PAPERS: dict[str, str] = {
    "local-sgd": """\
@misc{stich2019local,
  title         = {Local SGD Converges Fast and Communicates Little},
  author        = {Stich, Sebastian U.},
  year          = {2019},
  eprint        = {1805.09767},
  archivePrefix = {arXiv}
}

@misc{mcmahan2017communication,
  title         = {Communication-Efficient Learning of Deep Networks from Decentralized Data},
  author        = {McMahan, H. Brendan and others},
  year          = {2017},
  eprint        = {1602.05629},
  archivePrefix = {arXiv}
}
""",
    "diloco": _DILOCO,
    "opendiloco": """\
@misc{jaghouar2024opendiloco,
  title         = {OpenDiLoCo: An Open-Source Framework for Globally Distributed Low-Communication Training},
  author        = {Jaghouar, Sami and others},
  year          = {2024},
  eprint        = {2407.07852},
  archivePrefix = {arXiv}
}
""",
    "streaming": """\
@misc{douillard2025streaming,
  title         = {Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch},
  author        = {Douillard, Arthur and others},
  year          = {2025},
  eprint        = {2501.18512},
  archivePrefix = {arXiv}
}
""",
}
"""BibTeX by method. Baselines have no paper of their own; DiLoCo's compares with them."""


def citation(method: str) -> str:
    """BibTeX of a method; for a baseline, of the paper that compares with it, and a line that says so."""
    if method in PAPERS:
        return PAPERS[method]
    return f"% {method} is a baseline without a paper of its own; this one compares with it.\n{_DILOCO}"
