"""Error and speed of the wire formats. `errors` measures the error on real outer gradients."""
