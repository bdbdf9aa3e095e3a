"""Where each method was published, as BibTeX. Authors beyond the first are left to the bibliography."""


def _entry(key: str, author: str, title: str, year: int, **source: str) -> str:
    fields = {"title": title, "author": author, "year": str(year)} | source
    lines = ",\n".join(f"  {name:13} = {{{value}}}" for name, value in fields.items())
    return f"@misc{{{key},\n{lines}\n}}\n"


def _arxiv(key: str, author: str, title: str, year: int, number: str) -> str:
    return _entry(key, author, title, year, eprint=number, archivePrefix="arXiv")


_DILOCO = _arxiv(
    "douillard2023diloco",
    "Douillard, Arthur and others",
    "DiLoCo: Distributed Low-Communication Training of Language Models",
    2023,
    "2311.08105",
)
_OPENDILOCO = _arxiv(
    "jaghouar2024opendiloco",
    "Jaghouar, Sami and others",
    "OpenDiLoCo: An Open-Source Framework for Globally Distributed Low-Communication Training",
    2024,
    "2407.07852",
)
_FACTORED = _arxiv(
    "koneputugodage2026factored",
    "Hewa Koneputugodage, Chamin and others",
    "Factored Gossip DiLoCo: Reducing Blocking Communication in DiLoCo",
    2026,
    "2606.22768",
)

PAPERS: dict[str, str] = {
    "local-sgd": _arxiv(
        "stich2019local",
        "Stich, Sebastian U.",
        "Local SGD Converges Fast and Communicates Little",
        2019,
        "1805.09767",
    )
    + "\n"
    + _arxiv(
        "mcmahan2017communication",
        "McMahan, H. Brendan and others",
        "Communication-Efficient Learning of Deep Networks from Decentralized Data",
        2017,
        "1602.05629",
    ),
    "diloco": _DILOCO,
    "diloco-restarted": _arxiv("restarting2026", "others", "Outer-momentum restarting", 2026, "2605.28585"),
    "opendiloco": _OPENDILOCO,
    "opendiloco-sparse": _OPENDILOCO,
    "streaming": _arxiv(
        "douillard2025streaming",
        "Douillard, Arthur and others",
        "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch",
        2025,
        "2501.18512",
    ),
    "eager": _arxiv(
        "kale2025eager",
        "Kale, Satyen and others",
        "Eager Updates For Overlapped Communication and Computation in DiLoCo",
        2025,
        "2502.12996",
    ),
    **dict.fromkeys(
        (
            "factored-gossip",
            "global-m1",
            "global-m1-local-m2",
            "global-m1-local-m2-subset",
            "local-m1",
            "local-m1-m2",
            "local-m1-m2-subset",
            "global-m1-blocking",
            "local-m1-m2-blocking",
        ),
        _FACTORED,
    ),
    "noloco": _arxiv(
        "kolehmainen2025noloco",
        "Kolehmainen, Jari and others",
        "NoLoCo: No-all-reduce Low Communication Training Method for Large Models",
        2025,
        "2506.10911",
    ),
    "decoupled": _arxiv(
        "douillard2026decoupled",
        "Douillard, Arthur and others",
        "Decoupled DiLoCo for Resilient Distributed Pre-training",
        2026,
        "2604.21428",
    ),
    "async-local-sgd": _arxiv(
        "liu2024asynchronous",
        "Liu, Bo and others",
        "Asynchronous Local-SGD Training for Language Modeling",
        2024,
        "2401.09135",
    ),
    "sparseloco": _arxiv(
        "sarfi2025sparseloco",
        "Sarfi, Amir and others",
        "Communication Efficient LLM Pre-training with SparseLoCo",
        2025,
        "2508.15706",
    ),
    "muloco": _arxiv(
        "therien2025muloco",
        "Th{\\'e}rien, Benjamin and others",
        "MuLoCo: Muon is a practical inner optimizer for DiLoCo",
        2025,
        "2505.23725",
    ),
    "sparta": _entry(
        "beton2025sparta",
        "Beton, Matt and others",
        "SPARTA: Distributed Training with Sparse Parameter Averaging",
        2025,
        howpublished="EXO Labs, https://blog.exolabs.net/day-12",
    ),
}
"""BibTeX by method. Baselines have no paper of their own; DiLoCo's compares with them."""


def citation(method: str) -> str:
    """BibTeX of a method; for a baseline, of the paper that compares with it, and a line that says so."""
    if method in PAPERS:
        return PAPERS[method]
    return f"% {method} is a baseline without a paper of its own; this one compares with it.\n{_DILOCO}"
