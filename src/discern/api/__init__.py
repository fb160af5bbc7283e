"""The commands as Python functions, and a classifier with the interface of scikit-learn."""
