"""The models and the data that chapters and benches share."""
