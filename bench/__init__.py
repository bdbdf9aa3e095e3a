"""The measured promises: `python -m bench`, or `python -m bench boundary memory` for some of them."""
