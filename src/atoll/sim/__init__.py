"""Virtual time: any method on any network, and what to rent."""
