"""Side by side with what a user would pick instead: ``python -m dplab.bench [NAME]``.

Without a name, `page` runs the benches in turn and prints one page; with one, that bench alone.

A bench is a module of this package whose name stands in `page.BENCHES`. The first line of its
docstring says what it compares. It has two functions:

``add_arguments(parser)``
    adds its options; without any it does what its users need most.
``main(options)``
    measures and prints: first a line with its settings, then rows as they come. The frame has
    already printed the machine's line. What is missing for one row is said in its place; if the
    bench has no result at all, it raises, or ends with ``sys.exit(text)``.

Options decide what is measured, never how: what the page shows of a bench is what the same command
prints, and `page` says for each bench which options it gives. In a clone of the course, ``--save``
keeps the results in chapters/data, where chapters read them.
"""
