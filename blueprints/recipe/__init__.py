"""The recipe: grammar, layers, faults and explanations."""

from blueprints.recipe.document import Origin
from blueprints.recipe.load import LoadedRecipe, load_recipe
from blueprints.recipe.overrides import overrides_between
from blueprints.recipe.schema import Recipe
from blueprints.recipe.shipped import ShippedRecipe, shipped_recipes

__all__ = ["LoadedRecipe", "Origin", "Recipe", "ShippedRecipe", "load_recipe", "overrides_between", "shipped_recipes"]
