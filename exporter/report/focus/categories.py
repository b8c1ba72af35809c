"""FOCUS' services: which subcategory belongs to which category."""

_OTHER = "Other"
_NAMED: dict[str, str] = {
    "AI and Machine Learning": "AI Platforms|Bots|Generative AI|Machine Learning|Natural Language Processing",
    "Analytics": "Analytics Platforms|Business Intelligence|Data Processing|Search|Streaming Analytics",
    "Business Applications": "Productivity and Collaboration",
    "Compute": "Containers|End User Computing|Quantum Compute|Serverless Compute|Virtual Machines",
    "Databases": "Caching|Data Warehouses|Ledger Databases|NoSQL Databases|Relational Databases|Time Series Databases",
    "Developer Tools": "Developer Platforms|Continuous Integration and Deployment|Development Environments"
    "|Source Code Management|Quality Assurance",
    "Identity": "Identity and Access Management",
    "Integration": "API Management|Messaging|Workflow Orchestration",
    "Internet of Things": "IoT Analytics|IoT Platforms",
    "Management and Governance": "Architecture|Compliance|Cost Management|Data Governance|Disaster Recovery"
    "|Endpoint Management|Observability|Support",
    "Media": "Content Creation|Gaming|Media Streaming|Mixed Reality",
    "Migration": "Data Migration|Resource Migration",
    "Mobile": "",
    "Multicloud": "Multicloud Integration",
    "Networking": "Application Networking|Content Delivery|Network Connectivity|Network Infrastructure"
    "|Network Routing|Network Security",
    "Security": "Secret Management|Security Posture Management|Threat Detection and Response",
    "Storage": "Backup Storage|Block Storage|File Storage|Object Storage|Storage Platforms",
    "Web": "Application Platforms",
    _OTHER: "",
}

CATEGORIES: tuple[str, ...] = tuple(_NAMED)
CATEGORY_OF: dict[str, str] = {
    subcategory: category
    for category, named in _NAMED.items()
    for subcategory in (*filter(None, named.split("|")), f"{_OTHER} ({category})")
}
"""The one category of each subcategory."""
