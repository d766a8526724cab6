"""The models, data and published configurations that chapters and benches share."""
