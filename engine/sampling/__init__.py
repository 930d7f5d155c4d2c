"""From logits to tokens: parameters by slot, rules, noise, and the draw itself."""
