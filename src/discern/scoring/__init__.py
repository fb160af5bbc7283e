"""What a trained network says of text: which tokens look replaced, how likely a sentence is."""
