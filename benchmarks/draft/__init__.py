"""Makes an EAGLE-3 draft head for a target by distillation: data, training, export."""
