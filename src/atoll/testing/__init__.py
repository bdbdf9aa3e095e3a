"""What tests of methods and parts are written with: plain reference loops, toy problems, conformance checks."""
