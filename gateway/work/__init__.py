"""Work on what clients sent that takes long or holds Python's lock: the only place that starts processes for requests.

`TenantWork` runs it in small processes, tenants taking turns, within bounds for each, large jobs with a low priority.
What the work is stands in a module that is named to it, such as `gateway.text.worker`. Imports `auth` and what is below
it.
"""
