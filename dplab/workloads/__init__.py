"""The models, the data and the ways to train them that chapters and benches share."""
