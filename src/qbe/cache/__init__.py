"""The blueprint cache: queries like those seen before get the blueprints that those got."""

from qbe.cache.blueprints import BlueprintCache, CacheNumbers, open_cache

__all__ = ["BlueprintCache", "CacheNumbers", "open_cache"]
