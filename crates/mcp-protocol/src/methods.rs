//! Names of methods.

/// Begins a session (legacy era).
pub const INITIALIZE: &str = "initialize";
/// Ends the initialization of a session (legacy era).
pub const INITIALIZED: &str = "notifications/initialized";
/// Describes the server (modern era).
pub const DISCOVER: &str = "server/discover";
/// Checks that the other side answers (legacy era).
pub const PING: &str = "ping";
/// Lists the tools.
pub const TOOLS_LIST: &str = "tools/list";
/// Runs a tool.
pub const TOOLS_CALL: &str = "tools/call";
/// Gives a prompt.
pub const PROMPTS_GET: &str = "prompts/get";
/// Gives a resource.
pub const RESOURCES_READ: &str = "resources/read";
/// Asks for notifications about a resource (legacy era).
pub const RESOURCES_SUBSCRIBE: &str = "resources/subscribe";
/// Ends notifications about a resource (legacy era).
pub const RESOURCES_UNSUBSCRIBE: &str = "resources/unsubscribe";
/// Sets the level of log messages (legacy era).
pub const LOGGING_SET_LEVEL: &str = "logging/setLevel";
/// Gives the state of a task.
pub const TASKS_GET: &str = "tasks/get";
/// Changes a task.
pub const TASKS_UPDATE: &str = "tasks/update";
/// Cancels a task.
pub const TASKS_CANCEL: &str = "tasks/cancel";
/// Opens a stream of notifications (modern era).
pub const SUBSCRIPTIONS_LISTEN: &str = "subscriptions/listen";
/// Cancels a request.
pub const CANCELLED: &str = "notifications/cancelled";
/// Reports the progress of a request.
pub const PROGRESS: &str = "notifications/progress";
/// A log message.
pub const LOG_MESSAGE: &str = "notifications/message";
/// A resource has changed.
pub const RESOURCE_UPDATED: &str = "notifications/resources/updated";
/// The client's roots have changed (legacy era).
pub const ROOTS_CHANGED: &str = "notifications/roots/list_changed";
