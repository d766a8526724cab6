"""Side by side with what a user would pick instead: ``python -m dplab.bench [NAME]``.

A bench is a module of this package; its name stands in `__main__.BENCHES`. The first line of its
docstring says what it compares. It has two functions: ``add_arguments(parser)`` adds its options,
and ``main(options)`` measures and prints: first a line with its settings, then rows as they come.
What is missing for one row is said in its place; a bench that has no result at all raises, or ends
with ``sys.exit(text)``.
"""
