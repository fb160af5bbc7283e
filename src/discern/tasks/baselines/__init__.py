"""Simple predictors to compare a network with: models of scikit-learn, and a perceptron."""
