"""The learner's desk: what is kept of a reader's work, and how results look."""
