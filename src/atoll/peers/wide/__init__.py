"""Peers over the internet: islands that come, go, stall and hide behind routers."""
