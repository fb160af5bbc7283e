"""The commands as Python functions, and estimators with the interface of scikit-learn."""
