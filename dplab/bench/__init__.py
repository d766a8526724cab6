"""Side by side with what a user would pick instead: ``python -m dplab.bench [NAME]``.

A bench is a module with two functions: ``add_arguments(parser)`` adds its options, and
``main(options)`` measures and prints: first a line with its settings, then rows as they come.
"""
