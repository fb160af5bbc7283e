"""Simple predictors to set beside a network: what a score is worth without one. scikit-learn, and a perceptron of our own."""
