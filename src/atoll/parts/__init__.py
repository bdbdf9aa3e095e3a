"""Parts: pure data and pure functions from which methods are composed.

Part classes carry lower-case names because a composition reads like a formula and its `repr` is that formula again:
`Rule(every(500), outer=nesterov(lr=0.7, momentum=0.9))`.
"""
